"""The HTTP server: OpenAI's interface over an `Engine`, with limits, a log, metrics, and handling of faults.

In: HTTP requests on rank 0. Out: replies, whole or streamed. `request_models.py`, `prepared_request.py` and `replies.py`
are the interface without HTTP; `app.py` has the routes and `service.py` the limits; both run in asyncio's thread.
`driver.py` steps the engine in a thread of its own, and the other ranks follow. `page.html` is a chat page for browsers.
"""
