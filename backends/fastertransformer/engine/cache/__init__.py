"""Keys and values, and how tokens attend to them."""
