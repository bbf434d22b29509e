"""SGLang's architectures: which ones are served, and the reason for each refusal.

Tests keep the lists true: `tests/server/model/test_families.py` checks that every name of SGLang's registry is here,
and `test_families_served.py` compares answers with Transformers. For a name that is not here SGLang has no model of
its own; it runs Transformers' model with its layers, or reports that it cannot.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..plugin.text_alone import IMAGES, TEXT
from .target import Model


@dataclass(frozen=True, slots=True)
class Refused:
    """Architectures that are refused for one reason.

    kind: their common property. on_gpu: refused on GPUs too. names: separated by white space.
    """

    kind: str
    reason: str
    on_gpu: bool
    names: str


NAMES = """
ArceeForCausalLM Cohere2ForCausalLM CohereForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_ForCausalLM
GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
Gemma3nForCausalLM Gemma4ForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM GptOssForCausalLM
GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM LLaDA2MoeModelLM
LagunaForCausalLM Llama4ForCausalLM LlamaForCausalLM MellumForCausalLM Ministral3ForCausalLM MistralForCausalLM
MixtralForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
OlmoeForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM
Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SDARForCausalLM SDARMoeForCausalLM SeedOssForCausalLM
SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TransformersForCausalLM TransformersMoEForCausalLM
"""
NAMES_BY_TRANSFORMERS = """
AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM
ExaoneMoEForCausalLM ExaoneMoeForCausalLM GemmaForCausalLM HYV3ForCausalLM MiniMaxM2ForCausalLM
"""
BY_TRANSFORMERS = frozenset(NAMES_BY_TRANSFORMERS.split())
"""Served on CPUs by Transformers' code around SGLang's layers: SGLang's own has parts for GPUs alone, or answers
otherwise."""
TRANSFORMERS = ["TransformersForCausalLM", "TransformersMoEForCausalLM"]
NAMES_ON_CPUS = """
Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
Qwen3_5MoeForConditionalGeneration
"""
RECURRENT = frozenset(NAMES_ON_CPUS.split())
"""Served on CPUs alone, text only: some of their layers keep a state of each request, which follows accepted tokens
(`server/plugin/cpu/recurrent.py`)."""
TEXTS = frozenset(TEXT) - RECURRENT
"""Served on CPUs by the architecture of their text, `IMAGES` of them with images; on GPUs as SGLang does."""
SERVED = RECURRENT | BY_TRANSFORMERS | TEXTS | {*NAMES.split()}
SHOWING_NAMES = """
Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM
LagunaForCausalLM Llama4ForCausalLM LlamaForCausalLM MellumForCausalLM Ministral3ForCausalLM MistralForCausalLM
Phi3ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SmolLM3ForCausalLM
"""
SHOWING = RECURRENT | {*SHOWING_NAMES.split()}
"""Architectures that let drafters read hidden states, among the ones served on a CPU or with known drafters."""
REFUSED = (
    Refused(
        "embeddings, scores, classes",
        "it makes embeddings, scores or classes of text, and Outrider writes text",
        on_gpu=True,
        names="""
        BertForSequenceClassification BertModel CLIPModel Contriever EmbeddingGemma2Model EmbeddingGemmaModel
        Gemma2ForSequenceClassification InternLM2ForRewardModel Lfm2BidirectionalModel LlamaEmbeddingModel
        LlamaForClassification LlamaForSequenceClassification LlamaForSequenceClassificationWithNormal_Weights
        MistralModel NanbeigeForSequenceClassification PixtralVisionModel Qwen2ForRewardModel
        Qwen2ForSequenceClassification Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model
        TransformersEmbeddingModel TransformersForSequenceClassification TransformersMoEEmbeddingModel
        TransformersMoEForSequenceClassification TransformersMultiModalEmbeddingModel
        TransformersMultiModalForSequenceClassification TransformersMultiModalMoEEmbeddingModel
        TransformersMultiModalMoEForSequenceClassification XLMRobertaForSequenceClassification XLMRobertaModel
        """,
    ),
    Refused(
        "drafters",
        "it drafts for another model; serve that one, and name this with --drafter-path where it is DSpark or DFlash",
        on_gpu=True,
        names="""
        BailingMoeForCausalLMNextN DFlash2BeamDraftModel DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM
        DSparkDraftModel DSparkMiniMaxDraftModel DeepseekV3ForCausalLMNextN DeepseekV4ForCausalLMDSpark
        DeepseekV4ForCausalLMNextN Dots3NoteForCausalLMNextN Eagle3DeepseekV2ForCausalLM Ernie4_5_MoeForCausalLMMTP
        ExaoneMoEForCausalLMMTP Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
        GigaChat35ForCausalLMNextN Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLMNextN
        Glm5NextForConditionalGenerationNextN GlmMoeDsaForCausalLMNextN GlmOcrForConditionalGenerationNextN
        HYV3ForCausalLMNextN HYV4ForCausalLMNextN IQuestQ1MTP InklingForConditionalGenerationMTP
        Lfm2DSparkDraftModel LiLiCorrDraftModel LingDSparkModel LlamaForCausalLMEagle LlamaForCausalLMEagle3
        LongcatFlashForCausalLMNextN MiMoMTP MiMoV2MTP MiniMaxDFlash2DraftModel MistralForCausalLMEagle
        MistralLarge3ForCausalLMEagle MuseGlimmerAssistantModel NemotronHForCausalLMMTP Qwen2ForCausalLMEagle
        Qwen3DSparkModel Qwen3MoeForCausalLMMTP Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP
        Step3p5MTP
        """,
    ),
    Refused(
        "layers with a recurrent state",
        "it has layers with a recurrent state, which does not follow accepted tokens yet",
        on_gpu=True,
        names="""
        BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration FalconH1ForCausalLM
        FalconMambaForCausalLM Glm5NextForConditionalGeneration InklingForConditionalGeneration
        InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration JetNemotronForCausalLM
        JetVLMForConditionalGeneration KimiK3ForConditionalGeneration KimiK3LinearForCausalLM KimiLinearForCausalLM
        Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM
        MiniCPMSALAForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3
        NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
        Qwen4ExpForConditionalGeneration ZayaForCausalLM
        """,
    ),
    Refused(
        "encoders",
        "it reads its input by an encoder",
        on_gpu=True,
        names="""
        MllamaForConditionalGeneration MossVLForConditionalGeneration WhisperForConditionalGeneration
        """,
    ),
    Refused(
        "code of their own",
        "its configuration is code that comes with the model, which is not run",
        on_gpu=True,
        names="""
        BaichuanForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM DeciLMForCausalLM
        DeepseekForCausalLM Grok1ForCausalLM Grok1ModelForCausalLM IQuestCoderForCausalLM IQuestLoopCoderForCausalLM
        InternLM2ForCausalLM InternLM3ForCausalLM MiMoForCausalLM MindSporeForCausalLM MiniCPMForCausalLM
        OrionForCausalLM Phi3SmallForCausalLM QWenLMHeadModel SarvamMoEForCausalLM SolarForCausalLM
        TeleFLMForCausalLM XverseForCausalLM XverseMoeForCausalLM
        """,
    ),
    Refused(
        "images, sound",
        "it is made for images or sound, and on a CPU text models are served",
        on_gpu=False,
        names="""
        BailingMM2NativeForConditionalGeneration BailingMMNativeForConditionalGeneration
        Cohere2VisionForConditionalGeneration Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration
        DeepseekOCRForCausalLM DeepseekVL2ForCausalLM DiffusionGemmaForBlockDiffusion DotsOCRForCausalLM
        DotsVLMForCausalLM Ernie4_5_VLMoeForConditionalGeneration Gemma4UnifiedForConditionalGeneration
        GlmAsrForConditionalGeneration GlmImageForConditionalGeneration GlmOcrForConditionalGeneration
        InternS1ForConditionalGeneration
        InternS1ProForConditionalGeneration InternVLChatModel KimiK25ForConditionalGeneration
        KimiVLForConditionalGeneration LightOnOCRForConditionalGeneration
        LlavaForConditionalGeneration LlavaLlamaForCausalLM LlavaMistralForCausalLM LlavaQwenForCausalLM
        LlavaVidForCausalLM LocateAnythingForConditionalGeneration MiDashengLMModel MiMoV2ASRForCausalLM
        MiMoV2ForCausalLM MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
        MiniMaxM3SparseForConditionalGeneration MultiModalityCausalLM
        MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration NVILAForConditionalGeneration
        NVILALiteForConditionalGeneration POINTSV15ChatModel PaddleOCRVLForConditionalGeneration Phi4MMForCausalLM
        PixtralForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration
        Qwen3OmniMoeForConditionalGeneration Sarashina2VisionForCausalLM
        Step3VLForConditionalGeneration Step3p7ForConditionalGeneration StepVLForConditionalGeneration
        TransformersMultiModalForCausalLM TransformersMultiModalMoEForCausalLM UnlimitedOCRForCausalLM
        VoxtralForConditionalGeneration YiVLForCausalLM
        """,
    ),
    Refused(
        "latent attention",
        "its latent attention (MLA) has no kernel for CPUs",
        on_gpu=False,
        names="""
        DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
        Dots3NoteForCausalLM GigaChat35ForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM
        LongcatFlashForCausalLM MiniCPM3ForCausalLM MistralLarge3ForCausalLM SarvamMLAForCausalLM
        """,
    ),
    Refused(
        "attention of its own",
        "its attention (to blocks of an index, or prompts read both ways) has no kernel for CPUs",
        on_gpu=False,
        names="""
        HrmTextForCausalLM MiniMaxM3SparseForCausalLM
        """,
    ),
    Refused(
        "experts by Triton",
        "SGLang computes its experts by a Triton kernel, for GPUs alone, and Transformers by a layer of its own",
        on_gpu=False,
        names="""
        DbrxForCausalLM
        """,
    ),
    Refused(
        "nothing to compare with",
        "Transformers has no such model that answers on a CPU could be compared with",
        on_gpu=False,
        names="""
        BeamForCausalLM ChatGLMModel ExaoneForCausalLM IQuestQ1ForCausalLM K2HorizonForCausalLM MuseGlimmerForCausalLM
        NanbeigeForCausalLM Spark2_5ForCausalLM Step3p5ForCausalLM XllmForCausalLM
        """,
    ),
    Refused(
        "fields of its own",
        "SGLang reads other fields of its configuration than Transformers writes, so answers could not be compared",
        on_gpu=False,
        names="""
        MiMoV2FlashForCausalLM
        """,
    ),
    Refused(
        "other names of SGLang's",
        "it is SGLang's name for another way to run a model; the model's own name is served",
        on_gpu=False,
        names="""
        QuantMixtralForCausalLM TorchNativeLlamaForCausalLM TorchNativePhi3ForCausalLM
        """,
    ),
)

STATEFUL = frozenset({"conv", "linear_attention", "mamba", "recurrent"})
"""Layers, as `layer_types` names them, that keep a state in place of keys and values."""
STATES = next(each for each in REFUSED if "MambaForCausalLM" in each.names.split())
SEVERAL_POSITIONS = Refused(
    "M-RoPE", "its tokens have three positions each (M-RoPE), and drafts one", on_gpu=True, names=""
)
REASONS = {name: each for each in REFUSED for name in each.names.split()}


def is_recurrent(model: Model) -> bool:
    """Return True for a served model that keeps a state of each request."""
    return next(iter(model.config.get("architectures") or ()), "") in RECURRENT


def on_a_cpu(model: Model) -> list[str]:
    """Return SGLang's architectures that run the model on a CPU."""
    names = list(model.config.get("architectures") or ())
    return TRANSFORMERS if BY_TRANSFORMERS & {*names[:1]} else names


def check(model: Model, device: str) -> None:
    """Raise UserError, with the reason in one line, where the model's architecture is not served on "cpu" or "cuda"."""
    name = next(iter(model.config.get("architectures") or ()), "")
    refused = REASONS.get(name)
    if is_recurrent(model):
        if device == "cuda":
            reason = "its recurrent state follows accepted tokens on CPUs alone"
            raise UserError(f"{model.name} ({name}) is not served on a GPU: {reason}")
        return
    rope = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    if STATEFUL & {*(model.config.get("layer_types") or ())}:
        refused = STATES
    elif "mrope_section" in rope and (refused is None or not refused.on_gpu):
        alone = device == "cpu" and name in TEXT.values()
        refused = None if alone else SEVERAL_POSITIONS
    if refused is None or (device == "cuda" and not refused.on_gpu):
        return
    where = "" if refused.on_gpu else " on a CPU"
    raise UserError(f"{model.name} ({name or 'no architecture named'}) is not served{where}: {refused.reason}")


BEGINS, ENDS = "<!-- architectures: written by `make format` -->", "<!-- /architectures -->"


def with_table(document: str) -> str:
    """Return the document with the table of architectures between its two marks brought up to date."""
    groups = (
        ("", SERVED - RECURRENT - TEXTS),
        ("CPU", RECURRENT),
        ("CPU, images too", IMAGES),
        ("CPU, texts alone", TEXTS - {*IMAGES}),
    )
    rows = [("served", where, _short(names)) for where, names in groups]
    rows += [(f"{len(each.names.split())} refused", "" if each.on_gpu else "CPU", each.kind) for each in REFUSED]
    lines = ["| architectures | on | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    before, _, rest = document.partition(BEGINS)
    return "\n".join([f"{before}{BEGINS}", *lines, f"{ENDS}{rest.partition(ENDS)[2]}"])


def _short(names: Iterable[str]) -> str:
    endings = re.compile("ForCausalLM$|ForConditionalGeneration$|LMHeadModel$")
    short = {endings.sub("", name) for name in names if not name.startswith("Transformers")}
    return ", ".join(sorted(sorted(short), key=str.lower))


if __name__ == "__main__":  # `make format` keeps the table in server/README
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_table(path.read_text()))
