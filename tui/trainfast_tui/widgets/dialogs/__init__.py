"""Questions over a screen; the dialogs themselves are imported with the first one: the first frame needs none."""
