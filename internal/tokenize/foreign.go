package tokenize

import "bytes"

// foreign says why a model's ids cannot be known from its files, for chat and for completions; empty where they can.
type foreign struct {
	chat, completions string
}

// foreign finds the families for which the engine does not use the files of the model's folder. They are known by config.json
// and by the marks that their tokenizers have.
func (s *source) foreign() foreign {
	if s.mistral {
		const why = "the engine uses Mistral's own tokenizer (tekken.json or params.json), not HuggingFace's"
		return foreign{why, why}
	}
	// The engine renders these with code of its own; their tokenizer.json is right for plain text.
	switch s.modelType {
	case "gpt_oss":
		return foreign{chat: "the engine renders gpt-oss chats as Harmony messages, not by a template"}
	case "deepseek_v32", "deepseek_v4", "kimi_k3", "cohere", "cohere2", "cohere2_vision":
		return foreign{chat: "the engine renders chats of " + s.modelType + " with code of its own, not by a template"}
	}
	switch s.architecture {
	case "GptOssForCausalLM":
		return foreign{chat: "the engine renders gpt-oss chats as Harmony messages, not by a template"}
	case "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "KimiK3ForCausalLM":
		return foreign{chat: "the engine renders chats of " + s.architecture + " with code of its own, not by a template"}
	}
	if s.modelType == "" && s.harmony() {
		return foreign{chat: "the tokenizer has Harmony's marks: the engine renders such chats as Harmony messages, not by a template"}
	}
	return foreign{}
}

// harmony says whether the tokenizer has the marks of Harmony messages.
func (s *source) harmony() bool {
	for _, mark := range [...]string{`"<|channel|>"`, `"<|message|>"`, `"<|return|>"`} {
		if !bytes.Contains(s.tokenizerJSON, []byte(mark)) {
			return false
		}
	}
	return true
}
