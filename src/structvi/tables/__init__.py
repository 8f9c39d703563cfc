"""Own data without code: a table becomes columns, folds, fitted candidates, a posterior in a folder and a page."""
