package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Source is a model's chat templates and the variables that every render of them gets.
type Source struct {
	// Templates by name. A single one is named "default"; "tool_use" serves requests with tools.
	Templates map[string]string
	// SpecialTokens are variables such as bos_token and eos_token: strings, or lists of strings.
	SpecialTokens map[string]any
}

// ErrNoTemplate is returned by LoadSource for a model without a chat template.
var ErrNoTemplate = errors.New("no chat template")

// specialTokenNames are those that transformers hands to templates.
var specialTokenNames = []string{
	"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
}

// LoadSource reads a model's folder as transformers does: chat_template.jinja and additional_chat_templates/*.jinja, else
// chat_template.json, else tokenizer_config.json, whose chat_template is a text or a list of named ones. Special tokens
// come from special_tokens_map.json and tokenizer_config.json. Without a template the Source holds the special tokens and
// the error is ErrNoTemplate.
func LoadSource(dir string) (Source, error) {
	config, err := readObject(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil {
		return Source{}, err
	}
	tokens, err := specialTokens(dir, config)
	if err != nil {
		return Source{}, err
	}
	src := Source{SpecialTokens: tokens}
	for _, load := range []func() (map[string]string, error){
		func() (map[string]string, error) { return jinjaFiles(dir) },
		func() (map[string]string, error) { return jsonFile(filepath.Join(dir, "chat_template.json")) },
		func() (map[string]string, error) {
			return templates(config["chat_template"], filepath.Join(dir, "tokenizer_config.json"))
		},
	} {
		src.Templates, err = load()
		if err != nil {
			return Source{}, err
		}
		if len(src.Templates) > 0 {
			return src, nil
		}
	}
	return src, fmt.Errorf("%s: %w", dir, ErrNoTemplate)
}

// ReadTemplate reads a template given by the operator: a file with one template.
func ReadTemplate(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read chat template: %w", err)
	}
	return map[string]string{"default": string(text)}, nil
}

func jinjaFiles(dir string) (map[string]string, error) {
	out := map[string]string{}
	text, err := os.ReadFile(filepath.Join(dir, "chat_template.jinja"))
	switch {
	case err == nil:
		out["default"] = string(text)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read chat template: %w", err)
	}
	more, err := filepath.Glob(filepath.Join(dir, "additional_chat_templates", "*.jinja"))
	if err != nil {
		return nil, fmt.Errorf("list chat templates: %w", err)
	}
	for _, path := range more {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read chat template: %w", err)
		}
		out[strings.TrimSuffix(filepath.Base(path), ".jinja")] = string(text)
	}
	return out, nil
}

func jsonFile(path string) (map[string]string, error) {
	object, err := readObject(path)
	if err != nil {
		return nil, err
	}
	return templates(object["chat_template"], path)
}

// templates reads a chat_template: a text, a list of {name, template}, or an object of texts by name.
func templates(raw json.RawMessage, path string) (map[string]string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return map[string]string{"default": text}, nil
	}
	var list []struct{ Name, Template string }
	if json.Unmarshal(raw, &list) == nil {
		out := map[string]string{}
		for _, t := range list {
			out[t.Name] = t.Template
		}
		return out, nil
	}
	var byName map[string]string
	if json.Unmarshal(raw, &byName) == nil {
		return byName, nil
	}
	return nil, fmt.Errorf("%s: chat_template is neither a text, nor a list of named ones, nor an object of texts", path)
}

func specialTokens(dir string, config map[string]json.RawMessage) (map[string]any, error) {
	named, err := readObject(filepath.Join(dir, "special_tokens_map.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	set := func(name string, raw json.RawMessage) {
		if token, ok := tokenText(raw); ok {
			out[name] = token
		}
	}
	// What tokenizer_config.json says wins.
	for _, from := range []map[string]json.RawMessage{named, config} {
		for _, name := range specialTokenNames {
			set(name, from[name])
		}
		for _, name := range []string{"additional_special_tokens", "extra_special_tokens"} {
			var list []json.RawMessage
			if json.Unmarshal(from[name], &list) == nil && len(list) > 0 {
				texts := []string{}
				for _, raw := range list {
					if token, ok := tokenText(raw); ok {
						texts = append(texts, token)
					}
				}
				out["additional_special_tokens"] = texts
			}
			// Named ones of the model's own, such as image_token.
			var byName map[string]json.RawMessage
			if json.Unmarshal(from[name], &byName) == nil {
				for name, raw := range byName {
					set(name, raw)
				}
			}
		}
	}
	return out, nil
}

// tokenText is a token given as a text or as an AddedToken object.
func tokenText(raw json.RawMessage) (string, bool) {
	var text string
	if json.Unmarshal(raw, &text) == nil && string(raw) != "null" {
		return text, true
	}
	var added struct{ Content *string }
	if json.Unmarshal(raw, &added) == nil && added.Content != nil {
		return *added.Content, true
	}
	return "", false
}

// readObject reads a JSON object from a file; a missing file is an empty one.
func readObject(path string) (map[string]json.RawMessage, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read model files: %w", err)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return object, nil
}
