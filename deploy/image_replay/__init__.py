"""What deploy/replay-image is made of: a reader of Dockerfiles, roots to run their steps in, and what is asked of the results."""
