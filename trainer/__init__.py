"""Train, evaluate and export DFlash drafters. Imports nothing from dflash_ops."""
