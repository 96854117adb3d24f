"""`bascule train`: a run that saves, stops and resumes on any number of ranks."""
