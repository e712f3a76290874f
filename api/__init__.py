"""The command line (and, later, the HTTP server), thin over compiler and runtime."""
