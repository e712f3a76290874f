"""From a model description to an artifact: a pipeline of pure passes, without torch or a GPU."""
