"""The commands of ``alphamoe-trace``, one module each: ``prepare_parser(parser)`` and ``run(args) -> int``."""
