"""Training in balance: one step of it."""

from bascule.training.train_step import train_step as train_step
