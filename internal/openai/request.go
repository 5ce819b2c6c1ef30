package openai

import "encoding/json"

// Endpoint is the API that a request speaks. It decides which fields are read.
type Endpoint uint8

// The endpoints the gateway tells apart.
const (
	// Other is any path without a prompt that the gateway understands; only model, stream and user are read.
	Other Endpoint = iota
	// Chat is /v1/chat/completions.
	Chat
	// Completions is /v1/completions.
	Completions
	// Responses is /v1/responses.
	Responses
	// Messages is /v1/messages.
	Messages
	// Embeddings is /v1/embeddings.
	Embeddings
)

// String returns the endpoint's name, fit for a metric's label: the set is closed.
func (e Endpoint) String() string {
	switch e {
	case Chat:
		return "chat"
	case Completions:
		return "completions"
	case Responses:
		return "responses"
	case Messages:
		return "messages"
	case Embeddings:
		return "embeddings"
	case Other:
	}
	return "other"
}

// EndpointOf returns the endpoint that a URL path names.
func EndpointOf(path string) Endpoint {
	switch path {
	case "/v1/chat/completions":
		return Chat
	case "/v1/completions":
		return Completions
	case "/v1/responses":
		return Responses
	case "/v1/messages":
		return Messages
	case "/v1/embeddings":
		return Embeddings
	}
	return Other
}

// Reason says why a request's prompt cannot be tokenized by the gateway, so that it is routed by load alone. The set is
// closed: it is a metric's label.
type Reason string

// The reasons of Request.LoadOnly.
const (
	// ReasonEndpoint: the endpoint's prompt is not understood.
	ReasonEndpoint Reason = "endpoint"
	// ReasonNoPrompt: messages or prompt are absent, null or empty.
	ReasonNoPrompt Reason = "no_prompt"
	// ReasonBadField: a field that changes the prompt has a type the engine would refuse.
	ReasonBadField Reason = "bad_field"
	// ReasonSurrogate: a string holds an escaped surrogate without its partner. The engine refuses such text, so that no
	// replica can hold it; it has no meaning as UTF-8.
	ReasonSurrogate Reason = "lone_surrogate"
	// ReasonChatTemplate: the client sent its own chat template, which the gateway never compiles.
	ReasonChatTemplate Reason = "chat_template"
	// ReasonEmbeds: the prompt comes as embeddings.
	ReasonEmbeds Reason = "prompt_embeds"
	// ReasonNonFinite: the body holds NaN or Infinity, which the engine's parser takes and other parsers do not.
	ReasonNonFinite Reason = "non_finite"
)

// Request is what the gateway reads of a request. Every slice is a part of Body as it stands, never a copy; nothing may
// write to it. A Request is read-only after Parse and safe for concurrent use.
type Request struct {
	// Endpoint is what the request was parsed as.
	Endpoint Endpoint
	// Body is the whole body as the client sent it (decompressed, if it came compressed).
	Body []byte
	// Model is the model's name as the client wrote it; empty if absent or null.
	Model string
	// Stream says that the answer shall be streamed.
	Stream bool
	// IncludeUsage is stream_options.include_usage.
	IncludeUsage bool

	// Messages, Tools, Documents and ChatTemplateKwargs are the values as they stand in Body; nil if absent or null.
	// Messages and Tools are arrays and ChatTemplateKwargs is an object, unless LoadOnly says otherwise.
	Messages, Tools, Documents, ChatTemplateKwargs json.RawMessage
	// ToolChoice and ReasoningEffort are the values as they stand; nil if absent or null.
	ToolChoice, ReasoningEffort json.RawMessage
	// ChatTemplate says that the client sent a template of its own, at the top level or in ChatTemplateKwargs. It must
	// never be compiled.
	ChatTemplate bool
	// AddGenerationPrompt, ContinueFinalMessage and AddSpecialTokens are nil if absent or null.
	AddGenerationPrompt, ContinueFinalMessage, AddSpecialTokens *bool

	// Prompts are the prompts of a completion request in their order: one for a string or an array of token ids, several
	// for an array of these.
	Prompts []Prompt
	// CacheSalt keeps the engine's cache entries of this request apart from others'; empty for none. It is a secret.
	CacheSalt string
	// TruncatePromptTokens makes the engine keep the last so many tokens of the prompt (-1: what the model takes); nil
	// if absent or null.
	TruncatePromptTokens *int
	// Echo asks for the prompt in the answer.
	Echo bool
	// PromptLogprobs says that the prompt's own log probabilities are asked for: the engine then computes the whole
	// prompt, whatever its cache holds.
	PromptLogprobs bool
	// User and PromptCacheKey are what the client names itself and its conversation by; empty if absent.
	User, PromptCacheKey string
	// N is the number of choices; 1 if absent.
	N int
	// Images are the parts of messages that are not text, in the order in which they stand.
	Images []Image

	// LoadOnly is the reason why the prompt cannot be tokenized; empty if nothing stands against it.
	LoadOnly Reason
}

// Prompt is one prompt of a completion request: Tokens if it came as token ids, else Text.
type Prompt struct {
	// Text is the decoded text.
	Text string
	// Tokens are the token ids; nil for a text.
	Tokens []uint32
}

// Kind says what a part of a message is.
type Kind uint8

// The kinds of parts that are not text.
const (
	// KindOther is a part whose type the gateway does not know.
	KindOther Kind = iota
	// KindImage is a picture by URL, data URL or embedding.
	KindImage
	// KindAudio is a piece of sound.
	KindAudio
	// KindVideo is a film.
	KindVideo
)

// Image is a part of a message that is not text.
type Image struct {
	// Message and Part are the zero-based positions of the message and of the part in its content.
	Message, Part int
	// Kind is what the part is.
	Kind Kind
	// Digest is a hash over the kind and the content as it stands in the body (the URL or the data, escapes and all), and
	// over the uuid if there is one. Equal digests mean equal content; unequal ones may be two spellings of the same.
	Digest uint64
}
