// Package render turns a chat request into the text of its prompt, byte for byte as vLLM does: its preparation of messages
// and tools first, then the model's chat template as transformers renders it.
//
// In come the request's parts as they stand in the body (sub-slices, never decoded in Go), out comes one text. A render is
// one cgo call into native/src/render: minijinja with Python's semantics put over it. A template is compiled once and
// shared by any number of goroutines. Every render is bounded in work, time and output, runs on a stack of its own, and a
// panic inside becomes an error; so a hostile template costs its own renders and nothing else. Templates come from the
// model's files or the operator: one sent by a client is never compiled.
//
// # Images
//
// Media other than text come back as [Medium] values, in the order of the request. Where the template prints something
// for them (templates of [FormatParts] do: <|image_pad|> and its like), the range of what it printed is known; it is found
// by rendering a second time with marks in their places. The engine replaces that placeholder by a number of tokens that
// depends on the image, so positions behind the first medium are the gateway's own and not the engine's. For templates of
// [FormatText] vLLM puts the model's placeholders in front of the text; which they are is told by Options, and if it is not,
// the request is unsupported.
//
// Errors never quote what was rendered.
package render

/*
#include <stdlib.h>
#include "prefixgate_render.h"

extern void tokenizers_free_string(char *ptr);
*/
import "C"

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"
)

// Defaults of Options.
const (
	DefaultMaxOutputBytes = 16 << 20
	DefaultMaxFuel        = 20_000_000
	DefaultTimeout        = 2 * time.Second
)

// Format is how a template takes the content of a message.
type Format uint8

// Formats, under vLLM's names for them.
const (
	FormatAuto  Format = iota // as the template tells; in Options only
	FormatText                // "string": one text
	FormatParts               // "openai": a list of parts
)

// String returns vLLM's name of f.
func (f Format) String() string {
	switch f {
	case FormatText:
		return "string"
	case FormatParts:
		return "openai"
	default:
		return "auto"
	}
}

// Options configures a Template.
type Options struct {
	// Source is the template and the variables that come with it. Required.
	Source Source
	// ContentFormat overrides what the template tells. Zero: FormatAuto.
	ContentFormat Format
	// ImagePlaceholder, AudioPlaceholder and VideoPlaceholder are what the model's processor wants in a text for a medium.
	// They serve templates of FormatText only. Empty: a request with such a medium is unsupported.
	ImagePlaceholder, AudioPlaceholder, VideoPlaceholder string
	// DefaultKwargs is a JSON object of arguments that requests may override: vLLM's --default-chat-template-kwargs.
	DefaultKwargs json.RawMessage
	// ExcludeToolsWhenChoiceNone hides the tools of a request whose tool_choice is "none": vLLM's
	// --exclude-tools-when-tool-choice-none.
	ExcludeToolsWhenChoiceNone bool
	// Now is the clock of strftime_now, whose zone is the one shown. Nil: time.Now. vLLM shows its own local time.
	Now func() time.Time
	// MaxOutputBytes bounds the rendered text. Zero: DefaultMaxOutputBytes.
	MaxOutputBytes int
	// MaxFuel bounds the work and the memory of one render, in steps of the template, of which one also pays for 64 bytes.
	// Each render gets what its input justifies up to this: 2 million and 16 for each byte. Real templates take less than 1
	// for each byte. Zero: DefaultMaxFuel.
	MaxFuel uint64
	// Timeout bounds the time of one render. Zero: DefaultTimeout.
	Timeout time.Duration
}

// Input is one chat request: its parts as JSON text, of which nil means absent, and what it says of the prompt. The slices
// are read during the call only and never changed.
type Input struct {
	Messages, Tools, ToolChoice, Documents, ChatTemplateKwargs, ReasoningEffort []byte
	// AddGenerationPrompt is true where nil, ContinueFinalMessage false. Both true is refused, as vLLM does.
	AddGenerationPrompt, ContinueFinalMessage *bool
	// ChatTemplate says that the client sent a template of its own: such a request is unsupported.
	ChatTemplate bool
}

// MediumKind is a kind of content that is not text.
type MediumKind uint8

// Kinds of media.
const (
	Image MediumKind = iota
	Audio
	Video
)

// Medium is an image, a sound or a film in a request.
type Medium struct {
	// Message and Part index the request's messages and the message's content.
	Message, Part int
	Kind          MediumKind
	// Placed says whether the template's placeholder was found: then it is Text[Start:End].
	Placed     bool
	Start, End int
}

// Result is a rendered prompt.
type Result struct {
	// Text is the prompt. The caller owns it.
	Text []byte
	// Format is how the template took the messages' content.
	Format Format
	// Media holds the request's media in their order; nil if there are none.
	Media []Medium
	// UsesClock says that the template can print the time, so that equal requests may differ.
	UsesClock bool
}

// Kind says what a failed render means for the request.
type Kind uint8

// Kinds of errors.
const (
	// Refused: the template raised an exception. The engine answers 400.
	Refused Kind = iota + 1
	// Failed: the template failed on this conversation. The engine answers 400.
	Failed
	// Unsupported: the engine may well render it, this package cannot.
	Unsupported
	// Invalid: the engine refuses the request before its template sees it.
	Invalid
	// Limit: the render cost more than allowed.
	Limit
	// Panicked: a fault in the native library.
	Panicked
)

// String returns the kind in one word, fit for a metric's label.
func (k Kind) String() string {
	switch k {
	case Refused:
		return "refused"
	case Failed:
		return "failed"
	case Unsupported:
		return "unsupported"
	case Invalid:
		return "invalid"
	case Limit:
		return "limit"
	default:
		return "panicked"
	}
}

// Error is why a request has no rendered prompt. Its text is safe to log.
type Error struct {
	Kind   Kind
	Reason string
}

// Error implements error.
func (e *Error) Error() string {
	return "chat template " + e.Kind.String() + ": " + e.Reason
}

// ErrClosed is returned by a Template that was closed.
var ErrClosed = errors.New("chat template is closed")

// Template renders the chat requests of one model. All methods may be called at once from many goroutines.
type Template struct {
	now       func() time.Time
	format    Format
	hideTools bool

	// mu is held for reading during each call into the library, so that Close frees nothing in use.
	mu     sync.RWMutex
	native *C.prefixgate_template
}

// New compiles a template. An error says which one does not compile, and the line.
func New(opts Options) (*Template, error) {
	config, err := opts.config()
	if err != nil {
		return nil, err
	}
	var text *C.char
	native := C.prefixgate_template_new((*C.uint8_t)(unsafe.SliceData(config)), C.size_t(len(config)), &text)
	if native == nil {
		return nil, errors.New(takeText(text))
	}
	t := &Template{now: opts.Now, native: native, format: FormatText, hideTools: opts.ExcludeToolsWhenChoiceNone}
	if t.now == nil {
		t.now = time.Now
	}
	if C.prefixgate_template_format(native) == 1 {
		t.format = FormatParts
	}
	return t, nil
}

func (o *Options) config() ([]byte, error) {
	if len(o.Source.Templates) == 0 {
		return nil, errors.New("no chat template")
	}
	tokens := []byte("{}")
	if len(o.Source.SpecialTokens) > 0 {
		var err error
		if tokens, err = json.Marshal(o.Source.SpecialTokens); err != nil {
			return nil, fmt.Errorf("encode special tokens: %w", err)
		}
	}
	config := map[string]any{
		"templates":         o.Source.Templates,
		"special_tokens":    string(tokens),
		"content_format":    o.ContentFormat.String(),
		"default_kwargs":    string(o.DefaultKwargs),
		"image_placeholder": o.ImagePlaceholder,
		"audio_placeholder": o.AudioPlaceholder,
		"video_placeholder": o.VideoPlaceholder,
		"max_output_bytes":  orDefault(o.MaxOutputBytes, DefaultMaxOutputBytes),
		"max_fuel":          orDefault(o.MaxFuel, DefaultMaxFuel),
		"timeout_ms":        max(1, orDefault(o.Timeout, DefaultTimeout).Milliseconds()),
	}
	data, err := json.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("encode the renderer's configuration: %w", err)
	}
	return data, nil
}

func orDefault[T int | uint64 | time.Duration](v, def T) T {
	if v <= 0 {
		return def
	}
	return v
}

// ContentFormat returns how the template for requests without tools takes content.
func (t *Template) ContentFormat() Format {
	return t.format
}

// Render renders a chat request. The error is an *Error, or ErrClosed.
func (t *Template) Render(in *Input) (Result, error) {
	if in.ChatTemplate {
		return Result{}, &Error{Kind: Unsupported, Reason: "the request brings its own chat template"}
	}
	return t.render(in, false)
}

// RenderContext renders variables as they are handed to a template, a JSON object with messages and whatever else, without
// any preparation but that of continueFinal. It serves tests and people who debug templates.
func (t *Template) RenderContext(context []byte, continueFinal bool) (Result, error) {
	return t.render(&Input{Messages: context, ContinueFinalMessage: &continueFinal}, true)
}

// Close frees the template once no render uses it. Renders that come later return ErrClosed. It may be called again.
func (t *Template) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.native != nil {
		C.prefixgate_template_free(t.native)
		t.native = nil
	}
	return nil
}

func (t *Template) render(in *Input, context bool) (Result, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.native == nil {
		return Result{}, ErrClosed
	}
	var flags C.uint32_t
	for shift, flag := range map[uint]*bool{0: in.AddGenerationPrompt, 2: in.ContinueFinalMessage} {
		if flag != nil {
			flags |= 1 << shift
			if *flag {
				flags |= 2 << shift
			}
		}
	}
	tools := in.Tools
	if t.hideTools && string(bytes.TrimSpace(in.ToolChoice)) == `"none"` {
		tools = nil
	}
	now := t.now()
	_, offset := now.Zone()
	// Prompts are mostly their messages' text: a little room more and almost all of them need no second copy.
	size := len(in.Messages) + len(tools) + len(in.Documents)
	dst := make([]byte, size+size/8+2048)
	var (
		outcome C.prefixgate_render_outcome
		spill   *C.prefixgate_rendered
		text    *C.char
	)
	C.prefixgate_template_render(t.native, C.bool(context),
		data(in.Messages), C.size_t(len(in.Messages)),
		data(tools), C.size_t(len(tools)),
		data(in.Documents), C.size_t(len(in.Documents)),
		data(in.ChatTemplateKwargs), C.size_t(len(in.ChatTemplateKwargs)),
		data(in.ReasoningEffort), C.size_t(len(in.ReasoningEffort)),
		flags, C.int64_t(now.Unix()), C.uint32_t(now.Nanosecond()/1000), C.int32_t(offset),
		data(dst), C.size_t(len(dst)), &outcome, &spill, &text)
	if outcome.status != C.PREFIXGATE_RENDER_OK {
		return Result{}, &Error{Kind: Kind(outcome.status), Reason: takeText(text)}
	}
	result := Result{Format: FormatText, UsesClock: outcome.uses_clock != 0}
	if outcome.content_format == 1 {
		result.Format = FormatParts
	}
	if spill == nil {
		result.Text = dst[:outcome.len]
		return result, nil
	}
	result.Text = make([]byte, outcome.len)
	places := make([]C.prefixgate_render_place, outcome.media)
	C.prefixgate_template_take(spill, dataOrDummy(result.Text), unsafe.SliceData(places))
	for _, p := range places {
		result.Media = append(result.Media, Medium{
			Message: int(p.message), Part: int(p.part), Kind: MediumKind(p.kind),
			Placed: p.placed != 0, Start: int(p.start), End: int(p.end),
		})
	}
	return result, nil
}

func data(b []byte) *C.uint8_t {
	return (*C.uint8_t)(unsafe.SliceData(b))
}

// dataOrDummy never returns nil: an empty text is taken, too.
func dataOrDummy(b []byte) *C.uint8_t {
	if len(b) == 0 {
		b = make([]byte, 1)
	}
	return data(b)
}

// takeText copies and frees an error's text.
func takeText(text *C.char) string {
	if text == nil {
		return "no reason given"
	}
	defer C.tokenizers_free_string(text)
	return C.GoString(text)
}
