"""The engine: plan, execute, commit; and the offline front end over it."""
