"""What the blocks of a layer compute, and the weights that each of them has."""
