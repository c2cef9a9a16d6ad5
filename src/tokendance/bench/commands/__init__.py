"""`tokendance bench`: one file per subcommand, with TEXT, `add_arguments(parser)` and `run(args)`.

Nothing heavy is imported before `run`.
"""
