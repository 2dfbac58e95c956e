"""The HTTP front: OpenAI's API over the same requests that gRPC clients make (router/serving/inference.py)."""
