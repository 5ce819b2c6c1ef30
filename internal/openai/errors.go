package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"
)

// The types of an Error, as clients of the API know them.
const (
	// TypeInvalidRequest is a request that will not succeed as it is.
	TypeInvalidRequest = "invalid_request_error"
	// TypeNotFound is a model or path that is not served.
	TypeNotFound = "not_found_error"
	// TypeRateLimit is more than may be asked for at present.
	TypeRateLimit = "rate_limit_error"
	// TypeUnavailable is a replica missing or failing.
	TypeUnavailable = "service_unavailable_error"
	// TypeInternal is a fault of the gateway.
	TypeInternal = "internal_error"
)

// ErrorHeader marks an answer that the gateway made itself, so that it cannot be taken for the engine's.
const ErrorHeader = "X-Prefixgate-Error"

// Error is an error for the client, made by the gateway. Its text never holds any part of a request's body.
type Error struct {
	// Status is the HTTP status.
	Status int
	// Type is one of the Type constants.
	Type string
	// Code is a machine-readable name of the case, such as "model_not_found"; empty for null.
	Code string
	// Param is the request's field at fault; empty for null.
	Param string
	// Message says what is wrong and what to change.
	Message string
	// RetryAfter is when the client may try again; 0 sends no Retry-After header. It is rounded up to whole seconds.
	RetryAfter time.Duration
}

// Error returns status and message.
func (e *Error) Error() string {
	return strconv.Itoa(e.Status) + " " + e.Message
}

// BadRequest returns a 400 for a body that cannot be read.
func BadRequest(code, param, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Type: TypeInvalidRequest, Code: code, Param: param, Message: message}
}

// ModelNotFound returns the 404 for a model that no replica serves. The name is the client's own; it is cut at 200 bytes.
func ModelNotFound(model string) *Error {
	return &Error{
		Status: http.StatusNotFound, Type: TypeNotFound, Code: "model_not_found", Param: "model",
		Message: fmt.Sprintf("the model %q is not served here: GET /v1/models lists those that are", clip(model, 200)),
	}
}

// NotFound returns the 404 for a path that is not served.
func NotFound() *Error {
	return &Error{
		Status: http.StatusNotFound, Type: TypeNotFound, Code: "path_not_found",
		Message: "this path is not served by the gateway",
	}
}

// BodyTooLarge returns the 413 that names the limit.
func BodyTooLarge(limitBytes int64) *Error {
	return &Error{
		Status: http.StatusRequestEntityTooLarge, Type: TypeInvalidRequest, Code: "body_too_large",
		Message: fmt.Sprintf("the request body is larger than this gateway's limit of %d bytes: send a smaller one or raise the limit", limitBytes),
	}
}

// UnsupportedEncoding returns the 415 for a Content-Encoding that cannot be read.
func UnsupportedEncoding() *Error {
	return &Error{
		Status: http.StatusUnsupportedMediaType, Type: TypeInvalidRequest, Code: "unsupported_content_encoding",
		Message: "the request's Content-Encoding is not supported: send gzip, deflate, zstd or no encoding",
	}
}

// Overloaded returns the 429 for a gateway at its limit.
func Overloaded(retryAfter time.Duration) *Error {
	return &Error{
		Status: http.StatusTooManyRequests, Type: TypeRateLimit, Code: "overloaded",
		Message: "too many requests are waiting: try again later", RetryAfter: retryAfter,
	}
}

// NoReplica returns the 503 for a model that no replica can serve now.
func NoReplica(retryAfter time.Duration) *Error {
	return &Error{
		Status: http.StatusServiceUnavailable, Type: TypeUnavailable, Code: "no_replica",
		Message: "no replica can serve this request at present: try again later", RetryAfter: retryAfter,
	}
}

// UpstreamFailed returns the 502 for replicas that broke before they answered.
func UpstreamFailed() *Error {
	return &Error{
		Status: http.StatusBadGateway, Type: TypeUnavailable, Code: "replica_failed",
		Message: "the replica failed before it answered: try again",
	}
}

// Timeout returns the 504 for a replica that did not answer in time.
func Timeout() *Error {
	return &Error{
		Status: http.StatusGatewayTimeout, Type: TypeUnavailable, Code: "replica_timeout",
		Message: "the replica did not answer in time",
	}
}

// Internal returns the 500 for a fault of the gateway.
func Internal() *Error {
	return &Error{
		Status: http.StatusInternalServerError, Type: TypeInternal, Code: "internal_error",
		Message: "the gateway failed to handle this request",
	}
}

// WriteError answers with err in the API's shape. An err that is not an *Error becomes a 500 that tells nothing of it.
// Headers already set on w stay, except those that describe a body.
func WriteError(w http.ResponseWriter, err error) {
	var e *Error
	if !errors.As(err, &e) {
		e = Internal()
	}
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	in := inner{Message: e.Message, Type: e.Type}
	if e.Param != "" {
		in.Param = &e.Param
	}
	if e.Code != "" {
		in.Code = &e.Code
	}
	body, merr := json.Marshal(struct {
		Error inner `json:"error"`
	}{in})
	if merr != nil {
		panic("BUG: strings that do not marshal: " + merr.Error())
	}
	h := w.Header()
	for _, name := range [...]string{"Content-Encoding", "Etag", "Last-Modified", "Cache-Control", "Trailer"} {
		h.Del(name)
	}
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(ErrorHeader, "1")
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	w.WriteHeader(e.Status)
	w.Write(body)
}

// clip returns s cut to at most n bytes at a rune's start.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n]
}
