package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// Elsewhere the codes were mixed up: 500 or 429 where the pool was empty, plain text where clients parse JSON.
func TestErrorsHaveTheShapeClientsKnow(t *testing.T) {
	for _, c := range []struct {
		err                   error
		status                int
		typ, code, param, msg string
		retry                 string
	}{
		{BadRequest("invalid_json", "", "m"), 400, TypeInvalidRequest, "invalid_json", "", "m", ""},
		{ModelNotFound("nope"), 404, TypeNotFound, "model_not_found", "model", `"nope"`, ""},
		{NotFound(), 404, TypeNotFound, "path_not_found", "", "not served", ""},
		{BodyTooLarge(1234), 413, TypeInvalidRequest, "body_too_large", "", "1234 bytes", ""},
		{UnsupportedEncoding(), 415, TypeInvalidRequest, "unsupported_content_encoding", "", "gzip", ""},
		{Overloaded(1500 * time.Millisecond), 429, TypeRateLimit, "overloaded", "", "try again", "2"},
		{NoReplica(time.Second), 503, TypeUnavailable, "no_replica", "", "try again", "1"},
		{UpstreamFailed(), 502, TypeUnavailable, "replica_failed", "", "failed", ""},
		{Timeout(), 504, TypeUnavailable, "replica_timeout", "", "in time", ""},
		{fmt.Errorf("parse: %w", BadRequest("c", "p", "m")), 400, TypeInvalidRequest, "c", "p", "m", ""},
		{errors.New("canary"), 500, TypeInternal, "internal_error", "", "failed", ""},
	} {
		w := httptest.NewRecorder()
		w.Header().Set("Content-Encoding", "gzip") // Left by a handler that began something else.
		w.Header().Set("X-Request-Id", "id")
		WriteError(w, c.err)
		var got struct {
			Error struct {
				Message, Type string
				Param, Code   *string
			}
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("%v: body %s: %v", c.err, w.Body, err)
		}
		value := func(p *string) string {
			if p == nil {
				return ""
			}
			return *p
		}
		h := w.Result().Header
		if w.Code != c.status || got.Error.Type != c.typ || value(got.Error.Code) != c.code || value(got.Error.Param) != c.param || !strings.Contains(got.Error.Message, c.msg) {
			t.Errorf("%v: %d %s", c.err, w.Code, w.Body)
		}
		if h.Get("Content-Type") != "application/json" || h.Get(ErrorHeader) != "1" || h.Get("Retry-After") != c.retry || h.Get("Content-Encoding") != "" ||
			h.Get("X-Request-Id") != "id" || h.Get("Content-Length") != strconv.Itoa(w.Body.Len()) {
			t.Errorf("%v: header %v", c.err, h)
		}
		if strings.Contains(w.Body.String(), "canary") {
			t.Errorf("%s tells what went wrong inside", w.Body)
		}
	}
}

func TestModelNotFoundCutsTheName(t *testing.T) {
	e := ModelNotFound(strings.Repeat("é", 1000))
	if len(e.Message) > 400 || !utf8.ValidString(e.Message) || e.Status != http.StatusNotFound {
		t.Errorf("message of %d bytes: %q", len(e.Message), e.Message)
	}
}
