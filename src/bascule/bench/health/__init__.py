"""`bascule doctor`: whether ranks are alike, compute alike and reach each other, before a run."""
