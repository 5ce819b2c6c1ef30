package simhttp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// The shapes below have vLLM's fields in vLLM's order, nulls included: clients and gateways are tested against them.

type modelList struct {
	Object string      `json:"object"`
	Data   []modelCard `json:"data"`
}

type modelCard struct {
	ID          string            `json:"id"`
	Object      string            `json:"object"`
	Created     int64             `json:"created"`
	OwnedBy     string            `json:"owned_by"`
	Root        string            `json:"root"`
	Parent      *string           `json:"parent"`
	MaxModelLen *int              `json:"max_model_len"`
	Permission  []modelPermission `json:"permission"`
}

type modelPermission struct {
	ID                 string  `json:"id"`
	Object             string  `json:"object"`
	Created            int64   `json:"created"`
	AllowCreateEngine  bool    `json:"allow_create_engine"`
	AllowSampling      bool    `json:"allow_sampling"`
	AllowLogprobs      bool    `json:"allow_logprobs"`
	AllowSearchIndices bool    `json:"allow_search_indices"`
	AllowView          bool    `json:"allow_view"`
	AllowFineTuning    bool    `json:"allow_fine_tuning"`
	Organization       string  `json:"organization"`
	Group              *string `json:"group"`
	IsBlocking         bool    `json:"is_blocking"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

// fullUsage is the usage of an answer in one piece.
type fullUsage struct {
	usage
	PromptDetails struct {
		CachedTokens       int  `json:"cached_tokens"`
		CreatedCacheTokens *int `json:"created_cache_tokens"`
		MultimodalTokens   *int `json:"multimodal_tokens"`
	} `json:"prompt_tokens_details"`
	CompletionDetails *struct{} `json:"completion_tokens_details"`
}

// streamUsage is the usage at the end of a stream.
type streamUsage struct {
	usage
	PromptDetails struct {
		CachedTokens       int  `json:"cached_tokens"`
		CreatedCacheTokens *int `json:"created_cache_tokens,omitempty"`
	} `json:"prompt_tokens_details"`
}

type toolFunction struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

type toolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

// toolDelta is a part of a tool call in a stream; only the first part has ID and Type.
type toolDelta struct {
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Index    int          `json:"index"`
	Function toolFunction `json:"function"`
}

type chatMessage struct {
	Role         string     `json:"role"`
	Content      string     `json:"content"`
	Refusal      *string    `json:"refusal"`
	Annotations  *string    `json:"annotations"`
	Audio        *string    `json:"audio"`
	FunctionCall *string    `json:"function_call"`
	ToolCalls    []toolCall `json:"tool_calls,omitempty"`
	Reasoning    *string    `json:"reasoning"`
}

type chatChoice struct {
	Index         int         `json:"index"`
	Message       chatMessage `json:"message"`
	Logprobs      *struct{}   `json:"logprobs"`
	FinishReason  string      `json:"finish_reason"`
	StopReason    *string     `json:"stop_reason"`
	TokenIDs      []uint32    `json:"token_ids"`
	RoutedExperts *struct{}   `json:"routed_experts"`
}

type chatAnswer struct {
	ID                string       `json:"id"`
	Object            string       `json:"object"`
	Created           int64        `json:"created"`
	Model             string       `json:"model"`
	Choices           []chatChoice `json:"choices"`
	ServiceTier       *string      `json:"service_tier"`
	SystemFingerprint string       `json:"system_fingerprint"`
	Usage             fullUsage    `json:"usage"`
	PromptLogprobs    *struct{}    `json:"prompt_logprobs"`
	PromptTokenIDs    []uint32     `json:"prompt_token_ids"`
	PromptText        *string      `json:"prompt_text"`
	KVTransferParams  *struct{}    `json:"kv_transfer_params"`
	ECTransferParams  *struct{}    `json:"ec_transfer_params"`
	Metrics           *struct{}    `json:"metrics"`
}

type completionChoice struct {
	Index          int       `json:"index"`
	Text           string    `json:"text"`
	Logprobs       *struct{} `json:"logprobs"`
	FinishReason   string    `json:"finish_reason"`
	StopReason     *string   `json:"stop_reason"`
	TokenIDs       []uint32  `json:"token_ids"`
	PromptLogprobs *struct{} `json:"prompt_logprobs"`
	PromptTokenIDs []uint32  `json:"prompt_token_ids"`
	RoutedExperts  *struct{} `json:"routed_experts"`
}

type completionAnswer struct {
	ID                string             `json:"id"`
	Object            string             `json:"object"`
	Created           int64              `json:"created"`
	Model             string             `json:"model"`
	Choices           []completionChoice `json:"choices"`
	ServiceTier       *string            `json:"service_tier"`
	SystemFingerprint string             `json:"system_fingerprint"`
	Usage             fullUsage          `json:"usage"`
	KVTransferParams  *struct{}          `json:"kv_transfer_params"`
	ECTransferParams  *struct{}          `json:"ec_transfer_params"`
	Metrics           *struct{}          `json:"metrics"`
}

type chatDelta struct {
	Role      string      `json:"role,omitempty"`
	Content   *string     `json:"content,omitempty"`
	ToolCalls []toolDelta `json:"tool_calls,omitempty"`
}

// finish is the end of a choice in a stream: a null finish_reason stands alone, a real one goes with its stop_reason.
type finish struct {
	reason string
	stop   string
}

func (f finish) json() (reason, stop json.RawMessage) {
	if f.reason == "" {
		return json.RawMessage("null"), nil
	}
	stop = json.RawMessage("null")
	if f.stop != "" {
		stop = mustJSON(f.stop)
	}
	return mustJSON(f.reason), stop
}

type chatChunkChoice struct {
	Index        int             `json:"index"`
	Delta        chatDelta       `json:"delta"`
	Logprobs     *struct{}       `json:"logprobs"`
	FinishReason json.RawMessage `json:"finish_reason"`
	StopReason   json.RawMessage `json:"stop_reason,omitempty"`
	// TokenIDs is null, except in the first chunk, which does not have it.
	TokenIDs json.RawMessage `json:"token_ids,omitempty"`
}

type chatChunk struct {
	ID      string            `json:"id"`
	Object  string            `json:"object"`
	Created int64             `json:"created"`
	Model   string            `json:"model"`
	Choices []chatChunkChoice `json:"choices"`
	// PromptTokenIDs and PromptText are null in the first chunk and absent later.
	PromptTokenIDs    json.RawMessage `json:"prompt_token_ids,omitempty"`
	PromptText        json.RawMessage `json:"prompt_text,omitempty"`
	Usage             any             `json:"usage,omitempty"`
	SystemFingerprint string          `json:"system_fingerprint,omitempty"`
}

type completionChunkChoice struct {
	Index          int             `json:"index"`
	Text           string          `json:"text"`
	Logprobs       *struct{}       `json:"logprobs"`
	FinishReason   json.RawMessage `json:"finish_reason"`
	StopReason     json.RawMessage `json:"stop_reason"`
	PromptTokenIDs []uint32        `json:"prompt_token_ids"`
	TokenIDs       []uint32        `json:"token_ids"`
}

type completionChunk struct {
	ID                string                  `json:"id"`
	Object            string                  `json:"object"`
	Created           int64                   `json:"created"`
	Model             string                  `json:"model"`
	Choices           []completionChunkChoice `json:"choices"`
	Usage             any                     `json:"usage,omitempty"`
	SystemFingerprint string                  `json:"system_fingerprint,omitempty"`
}

var jsonNull = json.RawMessage("null")

// mustJSON encodes what always can be.
func mustJSON(v any) []byte {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("BUG: encode JSON: " + err.Error())
	}
	return []byte(strings.TrimSuffix(b.String(), "\n"))
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body := mustJSON(v)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body)
}

// apiError is an error in the engine's shape.
type apiError struct {
	status  int
	typ     string
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, typ: "BadRequestError", param: param, message: fmt.Sprintf(format, args...)}
}

// invalid is an error of the schema, which has a type of its own.
func invalid(param, problem string) *apiError {
	return &apiError{status: http.StatusBadRequest, typ: "Bad Request", param: param, message: "1 validation error:\n  " + problem}
}

func writeError(w http.ResponseWriter, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		e = &apiError{status: http.StatusInternalServerError, typ: "InternalServerError", message: err.Error()}
	}
	var body struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    int     `json:"code"`
		} `json:"error"`
	}
	body.Error.Message, body.Error.Type, body.Error.Code = e.message, e.typ, e.status
	if e.param != "" {
		body.Error.Param = &e.param
	}
	writeJSON(w, e.status, body)
}

// writeDetail answers as the web framework under the engine does by itself.
func writeDetail(w http.ResponseWriter, status int, detail string) {
	writeJSON(w, status, struct {
		Detail string `json:"detail"`
	}{detail})
}
