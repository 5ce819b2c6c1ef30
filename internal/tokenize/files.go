package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// Names of a model's files.
const (
	fileTokenizer   = "tokenizer.json"
	fileConfig      = "tokenizer_config.json"
	fileSpecial     = "special_tokens_map.json"
	fileTemplate    = "chat_template.jinja"
	fileTemplateOld = "chat_template.json"
	fileModel       = "config.json"
	fileTekken      = "tekken.json"
	fileMistral     = "params.json"
	dirTemplates    = "additional_chat_templates"
)

// maxFileBytes bounds every file that is read whole. The largest known tokenizer.json has 33 MB.
const maxFileBytes = 512 << 20

// source is what a model's folder holds, before anything is built from it.
type source struct {
	// dir is the folder that the files lie in.
	dir string
	// tokenizerPath is the tokenizer.json; it need not exist.
	tokenizerPath string
	// tokenizerJSON is its text; nil if there is none.
	tokenizerJSON []byte
	// config is tokenizer_config.json; zero if there is none.
	config tokenizerConfig
	// templates are the chat templates by name; "default" is the usual one. Empty if there is none.
	templates map[string]string
	// templatePath is where the default one came from, for errors.
	templatePath string
	// family is the family that config.json or the kind of files names, "" if unknown.
	modelType, architecture string
	mistral                 bool
}

// tokenizerConfig is what matters of tokenizer_config.json.
type tokenizerConfig struct {
	Class              string                `json:"tokenizer_class"`
	AddBOS             *bool                 `json:"add_bos_token"`
	AddEOS             *bool                 `json:"add_eos_token"`
	ChatTemplate       json.RawMessage       `json:"chat_template"`
	AddedTokensDecoder map[string]addedToken `json:"added_tokens_decoder"`
	// special holds bos_token and its like as the template sees them: a text or a list of texts.
	special map[string]any
}

// addedToken is an entry of added_tokens in tokenizer.json, and of added_tokens_decoder, whose key is the id.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// specialKeys are the names under which templates know the special tokens.
var specialKeys = [...]string{
	"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
	"image_token", "boi_token", "eoi_token", "audio_token", "video_token",
}

// readSource reads the files of a model from a folder, or from the folder of a tokenizer.json. templateOverride is a file
// that replaces the chat template, or "".
func readSource(path, templateOverride string) (*source, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", path, err)
	}
	src := &source{dir: path, templates: map[string]string{}}
	if !info.IsDir() {
		src.dir = filepath.Dir(path)
		src.tokenizerPath = path
	} else {
		src.tokenizerPath = filepath.Join(path, fileTokenizer)
	}
	src.tokenizerJSON, err = readOptional(src.tokenizerPath)
	if err != nil {
		return nil, err
	}
	if err := src.readConfig(); err != nil {
		return nil, err
	}
	if err := src.readModel(); err != nil {
		return nil, err
	}
	if err := src.readTemplates(templateOverride); err != nil {
		return nil, err
	}
	if src.tokenizerJSON == nil && !src.mistral {
		return nil, fmt.Errorf("model folder %s has no %s: name a folder that holds one, or set mode to remote or off", src.dir, fileTokenizer)
	}
	return src, nil
}

// readConfig reads tokenizer_config.json and special_tokens_map.json.
func (s *source) readConfig() error {
	s.config.special = map[string]any{}
	for _, name := range [...]string{fileSpecial, fileConfig} { // the later wins, as in transformers
		path := filepath.Join(s.dir, name)
		data, err := readOptional(path)
		if err != nil {
			return err
		}
		if data == nil {
			continue
		}
		if name == fileConfig {
			if err := json.Unmarshal(data, &s.config); err != nil {
				return fmt.Errorf("%s is not a tokenizer configuration: %w", path, err)
			}
		}
		var all map[string]json.RawMessage
		if err := json.Unmarshal(data, &all); err != nil {
			return fmt.Errorf("%s is not a JSON object: %w", path, err)
		}
		for _, key := range specialKeys {
			if value := specialValue(all[key]); value != nil {
				s.config.special[key] = value
			}
		}
	}
	return nil
}

// specialValue reads a special token: a text, an object with its content, or a list of these. It returns nil for anything else.
func specialValue(raw json.RawMessage) any {
	if len(raw) == 0 {
		return nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && string(raw) != "null" {
		return text
	}
	var token struct {
		Content *string `json:"content"`
	}
	if json.Unmarshal(raw, &token) == nil && token.Content != nil {
		return *token.Content
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || list == nil {
		return nil
	}
	texts := []string{}
	for _, item := range list {
		if text, ok := specialValue(item).(string); ok {
			texts = append(texts, text)
		}
	}
	return texts
}

// readModel reads what config.json says about the kind of model.
func (s *source) readModel() error {
	path := filepath.Join(s.dir, fileModel)
	data, err := readOptional(path)
	if err != nil {
		return err
	}
	if data != nil {
		var model struct {
			Type          string   `json:"model_type"`
			Architectures []string `json:"architectures"`
		}
		if err := json.Unmarshal(data, &model); err != nil {
			return fmt.Errorf("%s is not a model configuration: %w", path, err)
		}
		s.modelType = model.Type
		if len(model.Architectures) > 0 {
			s.architecture = model.Architectures[0]
		}
	}
	// The engine prefers Mistral's own tokenizer where its file is there.
	if _, err := os.Stat(filepath.Join(s.dir, fileTekken)); err == nil {
		s.mistral = true
	} else if _, err := os.Stat(filepath.Join(s.dir, fileMistral)); err == nil && s.tokenizerJSON == nil {
		s.mistral = true
	}
	return nil
}

// readTemplates collects the chat templates in transformers' order of precedence: an explicit file, chat_template.jinja with
// the folder of additional ones, chat_template.json, tokenizer_config.json.
func (s *source) readTemplates(override string) error {
	if override != "" {
		text, err := readOptional(override)
		if err != nil {
			return err
		}
		if text == nil {
			return fmt.Errorf("chat_template %s: the file does not exist", override)
		}
		s.templates["default"], s.templatePath = string(text), override
		return nil
	}
	path := filepath.Join(s.dir, fileTemplate)
	text, err := readOptional(path)
	if err != nil {
		return err
	}
	if text != nil {
		s.templates["default"], s.templatePath = string(text), path
		return s.readAdditional()
	}
	path = filepath.Join(s.dir, fileTemplateOld)
	text, err = readOptional(path)
	if err != nil {
		return err
	}
	raw := s.config.ChatTemplate
	s.templatePath = filepath.Join(s.dir, fileConfig)
	if text != nil && len(raw) == 0 {
		var file struct {
			ChatTemplate json.RawMessage `json:"chat_template"`
		}
		if err := json.Unmarshal(text, &file); err != nil {
			return fmt.Errorf("%s is not a JSON object with a chat_template: %w", path, err)
		}
		raw, s.templatePath = file.ChatTemplate, path
	}
	if len(raw) == 0 || string(raw) == "null" {
		return s.readAdditional()
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		s.templates["default"] = one
		return s.readAdditional()
	}
	var named []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(raw, &named); err != nil {
		return fmt.Errorf("%s: chat_template is neither a text nor a list of named templates: %w", s.templatePath, err)
	}
	for _, t := range named {
		s.templates[t.Name] = t.Template
	}
	return s.readAdditional()
}

// readAdditional reads the templates beside chat_template.jinja, each named by its file.
func (s *source) readAdditional() error {
	paths, err := filepath.Glob(filepath.Join(s.dir, dirTemplates, "*.jinja"))
	if err != nil {
		return nil //nolint:nilerr // only a bad pattern fails: the folder's name holds brackets
	}
	sort.Strings(paths)
	for _, path := range paths {
		text, err := readOptional(path)
		if err != nil {
			return err
		}
		s.templates[strings.TrimSuffix(filepath.Base(path), ".jinja")] = string(text)
	}
	return nil
}

// extraTokens returns what tokenizer_config.json declares beyond tokenizer.json's own tokens, ordered by id: transformers adds
// those when it loads the model.
func (s *source) extraTokens(known []addedToken) ([]addedToken, error) {
	have := make(map[string]bool, len(known))
	for _, t := range known {
		have[t.Content] = true
	}
	extra := []addedToken{}
	for id, t := range s.config.AddedTokensDecoder {
		if have[t.Content] {
			continue
		}
		if _, err := fmt.Sscanf(id, "%d", &t.ID); err != nil {
			return nil, fmt.Errorf("%s: added_tokens_decoder has the key %q, which is no token id", filepath.Join(s.dir, fileConfig), id)
		}
		extra = append(extra, t)
	}
	sort.Slice(extra, func(i, j int) bool { return extra[i].ID < extra[j].ID })
	return extra, nil
}

// readOptional returns a file's bytes, or nil if there is no such file.
func readOptional(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read model file: %w", err)
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read model file %s: %w", path, err)
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes: this is no file of a tokenizer", path, maxFileBytes)
	}
	return data, nil
}
