"""Tables with a cursor and orders, and the details of one row."""
