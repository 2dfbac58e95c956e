"""OpenAI's batch API: files of requests, answered in the batch class, whatever happens to routers meanwhile."""
