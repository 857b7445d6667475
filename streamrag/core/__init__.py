"""The values that travel through a query, and the protocols between its parts.

    query ──Source──▶ Append | Update | Skipped | CutShort ──Mode──▶ Prompt ──Backend──▶ Prefilled | AnswerChunk

Every value here is immutable. Implement `Source` to bring your own retrieval, `Backend` to bring your own engine, and
`Mode` to order contexts in your own way.
"""

from streamrag.core.protocols import MAX_NAME_CHARS as MAX_NAME_CHARS
from streamrag.core.protocols import Backend as Backend
from streamrag.core.protocols import Mode as Mode
from streamrag.core.protocols import ModelInfo as ModelInfo
from streamrag.core.protocols import Progress as Progress
from streamrag.core.protocols import Source as Source
from streamrag.core.protocols import Startable as Startable
from streamrag.core.protocols import Tokenizer as Tokenizer
from streamrag.core.protocols import Turn as Turn
from streamrag.core.protocols import only as only
from streamrag.core.protocols import part_name as part_name
from streamrag.core.protocols import plain_chat as plain_chat
from streamrag.core.values import MAX_INT as MAX_INT
from streamrag.core.values import MAX_STOP_CHARS as MAX_STOP_CHARS
from streamrag.core.values import MAX_STOP_TEXTS as MAX_STOP_TEXTS
from streamrag.core.values import AnswerChunk as AnswerChunk
from streamrag.core.values import Append as Append
from streamrag.core.values import BackendEvent as BackendEvent
from streamrag.core.values import Chunk as Chunk
from streamrag.core.values import CutShort as CutShort
from streamrag.core.values import Hint as Hint
from streamrag.core.values import LengthUnit as LengthUnit
from streamrag.core.values import Prefilled as Prefilled
from streamrag.core.values import Prompt as Prompt
from streamrag.core.values import RequestClass as RequestClass
from streamrag.core.values import SamplingParams as SamplingParams
from streamrag.core.values import Skipped as Skipped
from streamrag.core.values import SourceEvent as SourceEvent
from streamrag.core.values import TokenUsage as TokenUsage
from streamrag.core.values import Update as Update
from streamrag.core.values import common_prefix_len as common_prefix_len
