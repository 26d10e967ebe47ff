"""The whole stack on one machine, without Docker: broker, database, recorder and a CPU worker as child processes."""
