"""The values that travel through a query, and the protocols between its parts.

    query ──Source──▶ Append | Update | Skipped | CutShort ──Mode──▶ Prompt ──Backend──▶ Prefilled | AnswerChunk

Every value here is immutable. Implement `Source` to bring your own retrieval, `Backend` to bring your own engine, and
`Mode` to order contexts in your own way.
"""

from streamrag.core.answers import MAX_INT as MAX_INT
from streamrag.core.answers import MAX_STOP_CHARS as MAX_STOP_CHARS
from streamrag.core.answers import MAX_STOP_TEXTS as MAX_STOP_TEXTS
from streamrag.core.answers import AnswerChunk as AnswerChunk
from streamrag.core.answers import BackendEvent as BackendEvent
from streamrag.core.answers import Prefilled as Prefilled
from streamrag.core.answers import SamplingParams as SamplingParams
from streamrag.core.context import Append as Append
from streamrag.core.context import Chunk as Chunk
from streamrag.core.context import CutShort as CutShort
from streamrag.core.context import Hint as Hint
from streamrag.core.context import Skipped as Skipped
from streamrag.core.context import SourceEvent as SourceEvent
from streamrag.core.context import Update as Update
from streamrag.core.prompts import Prompt as Prompt
from streamrag.core.prompts import RequestClass as RequestClass
from streamrag.core.prompts import common_prefix_len as common_prefix_len
from streamrag.core.protocols import MAX_NAME_CHARS as MAX_NAME_CHARS
from streamrag.core.protocols import Backend as Backend
from streamrag.core.protocols import Mode as Mode
from streamrag.core.protocols import ModelInfo as ModelInfo
from streamrag.core.protocols import Progress as Progress
from streamrag.core.protocols import Source as Source
from streamrag.core.protocols import Startable as Startable
from streamrag.core.protocols import Tokenizer as Tokenizer
from streamrag.core.protocols import Turn as Turn
from streamrag.core.protocols import part_name as part_name
from streamrag.core.protocols import plain_chat as plain_chat
