"""Who may ask, and how much: API keys and what is used of their limits, over every protocol and all routers.

1. a front takes the Authorization header to control.Access, which finds the key and gives an identity, or refuses      401
2. `Identity.calling`, around the whole call: one request of the key's minute, one of those that it may have at once    429
3. `Identity.spending`, around each answer: the prompt's tokens are taken before anything is asked of a worker          429
4. the answer's tokens are taken at its end, however it ends; a prompt that no worker has seen is given back
"""
