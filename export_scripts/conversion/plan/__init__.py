"""What will be written, before anything is: what a checkpoint becomes, its size, its ids; or why it cannot be."""
