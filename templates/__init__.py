"""The CUDA sources: headers that open in an editor, and the few Jinja files that instantiate them."""
