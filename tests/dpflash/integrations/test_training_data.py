"""Data sets with entries in common are recognized by their storage, disjoint parts are not."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from dpflash.integrations.training_data import share_entries

datasets = pytest.importorskip("datasets")

X, Y = torch.randn(40, 3), torch.arange(40)
WHOLE = TensorDataset(X, Y)
LIST = [{"x": x} for x in X]
TABLE = datasets.Dataset.from_dict({"tokens": [[i, i + 1] for i in range(40)], "y": Y.tolist()})
PARTS = TABLE.train_test_split(test_size=0.5, seed=0)
HALVES = random_split(WHOLE, [20, 20], generator=torch.Generator().manual_seed(0))


class Lazy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index]


LAZY = Lazy()

SHARED = {
    "itself": (LAZY, LAZY),
    "one of several": ({"other": Lazy(), "same": LAZY}, LAZY),
    "a subset": (Subset(LAZY, [3, 5]), LAZY),
    "a subset of a subset": (Subset(Subset(LAZY, range(9, 20)), [0]), Subset(LAZY, [9])),
    "overlapping parts": (Subset(LAZY, range(20)), Subset(LAZY, range(19, 40))),
    "a concatenation": (ConcatDataset([Lazy(), Subset(LAZY, [7])]), LAZY),
    "another data set of the tensors": (TensorDataset(X[:9], Y[:9]), WHOLE),
    "views of the tensors": (TensorDataset(X[::2]), TensorDataset(X[10:11])),
    "an array of a tensor": (X.numpy()[5:7], WHOLE),
    "objects of a list": (LIST[7:9], LIST),
    "a table": (datasets.Dataset(TABLE.data), TABLE),
    "rows of a table": (TABLE.select([4, 2]), TABLE),
    "a slice of a table": (TABLE.select(range(30, 40)), TABLE.select([33, 1])),
    "a table without a column": (TABLE.remove_columns("y"), TABLE),
    "shuffled": (PARTS["test"].shuffle(seed=1), TABLE),
    "of two tables": (datasets.concatenate_datasets([PARTS["test"], TABLE]), TABLE),
}
APART = {
    "none": (None, WHOLE),
    "others": (Lazy(), LAZY),
    "parts of a split": tuple(HALVES),
    "every second row": (TensorDataset(X[::2]), TensorDataset(X[1::2])),
    "ends of a tensor": (TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:], Y[20:])),
    "ends of a list": (LIST[:20], LIST[20:]),
    "parts of a table": (PARTS["test"], PARTS["train"]),
    "slices of a table": (TABLE.select(range(20)), TABLE.select(range(20, 40))),
    "equal words": (["a", "b"], ["b", "c"]),
    "concatenations": (ConcatDataset([Lazy(), HALVES[0]]), ConcatDataset([Lazy(), HALVES[1]])),
}


@pytest.mark.parametrize("kind", [*SHARED, *APART])
def test_entries_in_common_are_recognized_by_their_storage(kind):
    one, two = {**SHARED, **APART}[kind]
    assert share_entries(one, two) == share_entries(two, one) == (kind in SHARED)
