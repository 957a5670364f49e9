"""What clients ask for: tensors, checked, as rows."""
