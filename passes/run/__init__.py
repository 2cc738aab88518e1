"""What runs programs in the place of a user's modules, and holds weights as codes."""
