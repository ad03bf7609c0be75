"""OpenAI's interface without HTTP: parameters and their checks, chat templates, calls, replies, errors.

In: the JSON of a request. Out: the sequences that the engine is to continue, and the JSON of the reply.
"""
