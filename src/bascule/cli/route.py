"""`bascule route http://node1:8000 http://node2:8000`: serve several jobs at one address."""

import signal
from contextlib import suppress

from bascule.quantities import count
from bascule.serve.options import RouteOptions


def run(options: RouteOptions, arguments: list[str]) -> None:
    """Send calls to jobs until a signal."""
    options.check()
    from bascule.serve.guard import guarded
    from bascule.serve.route import Router

    app = Router(options).app
    server, listener, address = guarded(app, options, most_open=5000, grace_s=20, keeps=True)
    what = f"router of {count(len(options.urls), 'job')} at {address}"
    print(f"{what}: a new request goes to the job that is free first", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again at its end
    with suppress(KeyboardInterrupt):
        server.run([listener])
