"""The CUDA sources: headers that open in an editor, and the Jinja files that instantiate them."""
