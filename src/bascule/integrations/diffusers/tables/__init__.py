"""Split tables: one for each model says where its tokens are cut and put together."""
