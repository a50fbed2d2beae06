"""Episodes of existing agent programs: each is a process that talks to the run's endpoint as if it
was OpenAI's, and what it asks and is answered becomes rows, token by token."""
