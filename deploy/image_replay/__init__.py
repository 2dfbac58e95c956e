"""Parts of deploy/replay-image: a reader of Dockerfiles, roots to run their steps in, and what is asked of the results."""
