package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"prefixgate/internal/config"
	"prefixgate/internal/openai"
	"prefixgate/internal/tokenize"
)

// maxLineBytes bounds a line of the input.
const maxLineBytes = 256 << 20

// tokenizeLines reads requests from stdin, one JSON object a line,
//
//	{"path": "/v1/chat/completions", "body": {…}}
//
// and writes for each a line {"rendered": …, "token_ids": […], "error": …}: what the gateway computes for such a request. The
// body's bytes are taken as they stand. For a completion with several prompts both are lists, with one element for each.
// A line that cannot be used gets a line with an error, and the next is read.
func tokenizeLines(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	model, err := tokenizeModel(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		complain(stderr, err)
		return exitUsage
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	m, err := tokenize.Load(ctx, model, log, nil)
	if err != nil {
		complain(stderr, err)
		return exitError
	}
	defer m.Close()
	in := bufio.NewReaderSize(stdin, 1<<20)
	out := bufio.NewWriterSize(stdout, 1<<16)
	for ctx.Err() == nil {
		line, readErr := readLine(in)
		if len(bytes.TrimSpace(line)) > 0 || errors.Is(readErr, errLongLine) {
			var result tokenized
			if errors.Is(readErr, errLongLine) {
				result = tokenized{Error: readErr.Error()}
			} else {
				result = tokenizeLine(ctx, m, line)
			}
			if err := result.write(out); err != nil {
				complain(stderr, fmt.Errorf("write: %w", err))
				return exitError
			}
		}
		// Whoever talks to this program line by line gets each answer at once; a file gets its answers in large pieces.
		if in.Buffered() == 0 || readErr != nil {
			if err := out.Flush(); err != nil {
				complain(stderr, fmt.Errorf("write: %w", err))
				return exitError
			}
		}
		if errors.Is(readErr, io.EOF) {
			return exitOK
		}
		if readErr != nil && !errors.Is(readErr, errLongLine) {
			complain(stderr, fmt.Errorf("read: %w", readErr))
			return exitError
		}
	}
	return exitError
}

// tokenizeModel reads the flags of gateway tokenize.
func tokenizeModel(args []string, stderr io.Writer) (tokenize.Options, error) {
	flags := flag.NewFlagSet("gateway tokenize", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, "gateway tokenize shows what the gateway makes of requests: the rendered chat template and the token ids.\n\n"+
			"  gateway tokenize --model Qwen/Qwen3-8B < requests.jsonl\n\n"+
			"Each line is {\"path\": \"/v1/chat/completions\", \"body\": {…}}; each answer {\"rendered\": …, \"token_ids\": […], \"error\": …}.\n\n")
		flags.PrintDefaults()
	}
	name := flags.String("model", "", "folder, tokenizer.json or hub name of the `model`; with --config one of its models' names")
	file := flags.String("config", "", "YAML `file` with the configuration of the model")
	template := flags.String("chat-template", "", "`file` with the model's chat template, instead of its own")
	encoder := flags.String("encoder", "", "auto or huggingface (default auto)")
	if err := flags.Parse(args); err != nil {
		return tokenize.Options{}, err
	}
	if flags.NArg() > 0 {
		return tokenize.Options{}, fmt.Errorf("unexpected argument %q: the model follows --model", flags.Arg(0))
	}
	opts := tokenize.Options{Model: *name, Mode: tokenize.ModeLocal}
	if *file != "" {
		cfg, err := config.Load(*file)
		if err != nil {
			return tokenize.Options{}, err
		}
		if opts, err = modelOf(cfg, *name); err != nil {
			return tokenize.Options{}, err
		}
	}
	override(&opts.ChatTemplate, *template)
	if *encoder != "" {
		opts.Encoder = tokenize.Encoder(*encoder)
	}
	if opts.Model == "" {
		return tokenize.Options{}, errors.New("no model: name one with --model")
	}
	return opts, opts.Validate()
}

// modelOf returns the tokenizer of a model of the configuration; without a name, of its only one.
func modelOf(cfg *config.Config, name string) (tokenize.Options, error) {
	for _, m := range cfg.Models {
		if name == "" && len(cfg.Models) == 1 || name != "" &&
			(m.Name == name || m.Tokenizer.Model == name || slices.Contains(m.Aliases, name)) {
			return m.Tokenizer, nil
		}
	}
	return tokenize.Options{}, fmt.Errorf("the configuration has %d models, and none of them was named: pass one of their names with --model", len(cfg.Models))
}

// errLongLine is a line of more than maxLineBytes.
var errLongLine = fmt.Errorf("the line is longer than %d bytes", maxLineBytes)

// readLine returns the next line without its end. A line that is too long is passed over.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	long := false
	for {
		part, err := in.ReadSlice('\n')
		if !long {
			if line == nil && err == nil {
				return part, nil // valid until the next read
			}
			line = append(line, part...)
			if len(line) > maxLineBytes {
				long, line = true, nil
			}
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if long && (err == nil || errors.Is(err, io.EOF)) {
			return nil, errLongLine
		}
		return line, err
	}
}

// tokenized is a line of the output.
type tokenized struct {
	Rendered any    // string, or list of strings
	IDs      any    // list of ids, or list of lists
	Error    string // empty for null
}

// tokenizeLine computes the answer to one line.
func tokenizeLine(ctx context.Context, m *tokenize.Model, line []byte) tokenized {
	var in struct {
		Path string          `json:"path"`
		Body json.RawMessage `json:"body"`
	}
	if err := json.Unmarshal(line, &in); err != nil {
		return tokenized{Error: "the line is not a JSON object with path and body"}
	}
	if in.Path == "" {
		in.Path = "/v1/chat/completions"
	}
	ep := openai.EndpointOf(in.Path)
	if ep != openai.Chat && ep != openai.Completions {
		return tokenized{Error: "path: want /v1/chat/completions or /v1/completions"}
	}
	if in.Body == nil {
		return tokenized{Error: "body: it is missing"}
	}
	req, err := openai.Parse(ep, in.Body)
	if err != nil {
		return tokenized{Error: err.Error()}
	}
	if len(req.Prompts) <= 1 {
		rendered, ids, err := m.Explain(ctx, req)
		return tokenizedOf(rendered, ids, err)
	}
	var texts []string
	var lists [][]uint32
	for _, p := range req.Prompts {
		one := *req
		one.Prompts = []openai.Prompt{p}
		rendered, ids, err := m.Explain(ctx, &one)
		if err != nil {
			return tokenized{Error: err.Error()}
		}
		texts, lists = append(texts, rendered), append(lists, ids)
	}
	return tokenized{Rendered: texts, IDs: lists}
}

func tokenizedOf(rendered string, ids []uint32, err error) tokenized {
	if err != nil {
		t := tokenized{Error: err.Error()}
		if rendered != "" {
			t.Rendered = rendered
		}
		return t
	}
	if ids == nil {
		ids = []uint32{}
	}
	return tokenized{Rendered: rendered, IDs: ids}
}

// write writes the line. Absent parts are null.
func (t tokenized) write(w *bufio.Writer) error {
	out := struct {
		Rendered any     `json:"rendered"`
		IDs      any     `json:"token_ids"`
		Error    *string `json:"error"`
	}{t.Rendered, t.IDs, nil}
	if t.Error != "" {
		out.Error = &t.Error
	}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(out) // with the end of line
}
