"""A cluster on one machine: files that its processes lock, in a folder of the user."""
