"""The device of these tests, by STRUCTVI_TEST_DEVICE: "cuda" if it is not set; with "cpu" their logic runs anywhere."""

import os

import torch

DEVICE = torch.device(os.environ.get("STRUCTVI_TEST_DEVICE", "cuda"))
