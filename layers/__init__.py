"""Layers as Equinox modules, the attention algorithms, and the sharding plan.

The attention algorithms take global arrays, a mask and a mesh, and serve any model: q `[batch seq heads head_dim]`, k
and v `[batch kv_seq kv_heads head_dim]`.
"""

from layers.blockwise import local_attention as local_attention
from layers.dense import dense_attention as dense_attention
from layers.energy import attention_energy as attention_energy
from layers.gather import gather_attention as gather_attention
from layers.mask import Mask as Mask
from layers.order import from_order as from_order
from layers.order import to_order as to_order
from layers.partial import Partial as Partial
from layers.partial import merge as merge
from layers.ring import ring_attention as ring_attention
from layers.tree import tree_attention as tree_attention
from layers.tree import tree_combine as tree_combine
