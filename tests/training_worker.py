"""One of two processes that train together: `python training_worker.py PORT NUMBER MESH FILE`.

Each has four simulated devices and reads only the rows that its own devices hold.
"""

import pickle
import sys

import jax
import numpy as np

port, number, digits, file = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)

import training  # noqa: E402
from treering.configs.mesh import AXES  # noqa: E402
from treering.layers.parallel.sharding import make_mesh  # noqa: E402
from treering.train.data.batch import Batch  # noqa: E402

plan = training.train_plan(make_mesh(dict(zip(AXES, map(int, digits), strict=True))))
assert len(plan.mesh.local_devices) == 4
sharding = plan.sharding("batch seq", (training.ROWS, training.WINDOW))
mine = sharding.addressable_devices_indices_map((training.ROWS, training.WINDOW)).values()
rows = [index[0].indices(training.ROWS) for index in mine if index is not None]
first, last = min(start for start, _, _ in rows), max(stop for _, stop, _ in rows)
data = [jax.tree.map(lambda x: x[first:last], batch) for batch in training.batches()]
assert isinstance(data[0], Batch)
done = training.run(plan, data=data, first_row=first, rows=training.ROWS)
done.state = None  # Its arrays belong to this process's devices.
with open(file, "wb") as out:
    pickle.dump(done, out)
np.testing.assert_equal(jax.process_count(), 2)
