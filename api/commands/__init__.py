"""One module for each verb of the command line; what a verb needs is imported when it runs."""
