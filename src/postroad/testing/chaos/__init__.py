"""Real processes that are killed, stopped and robbed of their database while a program's every promise is checked."""
