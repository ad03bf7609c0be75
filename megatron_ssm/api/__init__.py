"""OpenAI's interface without HTTP: models of requests, replies and errors; chat templates; prepared requests.

In: the JSON of a request. Out: the sequences that the engine is to continue, and the JSON of the reply.
"""
