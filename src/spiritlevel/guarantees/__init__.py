"""What a flatness number buys: the guarantees that the papers derive their measures from, computed honestly.

A result prints, saves, draws itself and makes a page:

>>> import tempfile, torch, spiritlevel as sl
>>> model, data = torch.nn.Linear(2, 1), (torch.eye(2), torch.zeros(2, 1))
>>> found = sl.feature_robustness(model, data, "weight", 0.1, "mse", num_matrices=2, ascend=False, deltas=[0.1, 0.2])
>>> found.to_dict()["delta"], type(found.drawing()).__name__
(0.1, 'Drawing')
>>> with tempfile.TemporaryDirectory() as folder:
...     found.save(f"{folder}/robustness.json")
...     found.to_html(f"{folder}/robustness.html")
"""
