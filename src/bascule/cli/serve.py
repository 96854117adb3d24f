"""`bascule serve`: a pipeline behind HTTP, on local ranks or in a job that runs."""

from contextlib import nullcontext

from bascule.serve.options import ServeOptions


def run(options: ServeOptions, arguments: list[str]) -> None:
    """Serve on all ranks until a signal; what is not done then is in the spool."""
    options.check()
    from bascule.cli.command import on_ranks
    from bascule.cli.launch import forwarding_stops, in_a_job
    from bascule.serve.serving import run_server

    with nullcontext() if in_a_job() else forwarding_stops():
        on_ranks(options, arguments, lambda device: run_server(options, device), lambda _: None)
