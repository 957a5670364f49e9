"""The served model against its source: does the server compute with the weights that were trained."""
