"""What moves: the transaction of the user, the loops, and the app that composes them."""
