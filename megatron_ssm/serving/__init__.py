"""The HTTP server: serves the interface of `api` with an `Engine`, enforces limits, and handles faults.

In: HTTP requests on rank 0. Out: replies, whole or streamed, and metrics. `app.py` has the routes and `service.py` the
limits; both run in asyncio's thread. `driver.py` steps the engine in a thread of its own, and the other ranks follow.
`page.html` is a chat page for browsers, which uses the interface like any other client.
"""
