"""Commands of the command line that are larger than a call: options, and what is printed."""
