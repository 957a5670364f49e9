"""Where in a target each part of its sources belongs, and how its values get there."""
